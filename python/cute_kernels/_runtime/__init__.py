"""What every operation needs and none owns: the extension, backends, checks of arguments, torch ops, launches."""
