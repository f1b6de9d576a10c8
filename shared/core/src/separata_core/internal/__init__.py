"""What core offers to the packages of this repository alone, without any promise about the next release."""
