"""A job that survives a bad device: launched on torch's elastic agent, relaunched without what was convicted."""
