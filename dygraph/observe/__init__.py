"""What watches the stages while they run: hooks, timers, checks for NaN, guards, measured costs."""
