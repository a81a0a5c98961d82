"""Models as dictionaries of tensors, in files, and back."""

from ...frontend.nn import (
    get_parameters, get_state_dict, load_state_dict, safe_load, safe_load_metadata, safe_save)

__all__ = ['get_parameters', 'get_state_dict', 'load_state_dict', 'safe_load', 'safe_load_metadata', 'safe_save']
