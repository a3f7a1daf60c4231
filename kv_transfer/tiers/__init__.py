"""Places that hold pages beside the pool: host memory, local files, object stores."""
