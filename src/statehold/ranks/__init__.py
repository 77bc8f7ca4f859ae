"""How the ranks of a job find each other and talk, without collectives."""
