"""The vocabulary that every room uses: errors, value classes, units, the model of a host, the choice of devices."""
