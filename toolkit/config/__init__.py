"""From a run and a layout to the DeepSpeed JSON that the engine gets, with every conflict found before a rank starts."""
