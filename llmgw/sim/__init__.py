"""Stand-ins with seeds for every port: what tests, drills and simulations run the real tasks on."""
