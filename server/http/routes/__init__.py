"""The HTTP routes, one router per file, each made by a function of the ``Serving`` it is given."""
