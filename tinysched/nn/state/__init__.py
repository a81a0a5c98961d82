"""Models as dictionaries of tensors, and back."""

from ...frontend.nn import get_parameters, get_state_dict, load_state_dict

__all__ = ['get_parameters', 'get_state_dict', 'load_state_dict']
