"""From prompts to measured trees: trace once, replay any tree or policy, grow the best ones."""
