"""When: tickets in order, admission, assignment, reordering, delivery."""
