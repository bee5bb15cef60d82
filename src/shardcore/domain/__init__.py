"""What sharding is: meshes, placements, layouts and redistribution, as pure data."""
