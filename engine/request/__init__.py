"""From the arguments of a call to one checked, frozen `Request`."""
