"""From a run and a layout to the engine's DeepSpeed JSON, with all conflicts found before a rank starts."""
