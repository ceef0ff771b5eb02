"""Where the rooms meet: each role builds its adapters here and opens the top nursery."""
