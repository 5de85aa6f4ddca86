"""The mixture-of-experts layer whose experts lie along a mesh axis."""
