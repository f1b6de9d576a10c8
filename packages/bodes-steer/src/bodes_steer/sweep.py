"""The public name `sweep`; see `bodes_steer.sweeps`."""

from bodes_steer.sweeps import sweep as sweep
