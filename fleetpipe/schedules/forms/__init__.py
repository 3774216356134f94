"""How schedules are written and drawn: as text, in a terminal, as a trace and as a picture."""
