"""From a run and a layout to the DeepSpeed JSON that the engine gets; conflicts are found before a rank starts."""
