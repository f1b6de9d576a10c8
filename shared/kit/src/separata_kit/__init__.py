"""What every package's rim needs and no method is about: files, journals, rows of data, command lines, pictures.

For the packages of this repository alone: nothing here is promised to anyone else.
"""
