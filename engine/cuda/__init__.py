"""The engine on one NVIDIA GPU: steps in flight on streams, state on the device, decodes as captured graphs."""
