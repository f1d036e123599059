"""FlashVSR: streaming x4 video super-resolution in one step."""
