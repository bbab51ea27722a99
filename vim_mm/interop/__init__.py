"""The models and the scan behind other libraries' interfaces, each imported by itself."""
