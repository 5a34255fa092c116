"""Back ends, one file each, found by name and chosen once by `kernels.table`."""
