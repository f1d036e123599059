"""Config classes, variants of configs, and their text form (no torch)."""

from flashdreams.config.base import ConfigError, InstantiateConfig, import_object, nested_configs
from flashdreams.config.derive import derive_config
from flashdreams.config.fields import FieldTypeError, UnknownFieldError
from flashdreams.config.plain import apply_dict, to_dict
from flashdreams.config.text import apply_yaml, to_yaml

__all__ = [
    "ConfigError",
    "FieldTypeError",
    "InstantiateConfig",
    "UnknownFieldError",
    "apply_dict",
    "apply_yaml",
    "derive_config",
    "import_object",
    "nested_configs",
    "to_dict",
    "to_yaml",
]
