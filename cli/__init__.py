"""The ``dsa-plan`` command: ``main`` has the commands, ``request`` reads their options, ``render`` prints."""
