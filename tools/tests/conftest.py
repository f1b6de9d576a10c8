import sys
from pathlib import Path

# The scripts import each other by bare name, since Python puts a script's own folder on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
