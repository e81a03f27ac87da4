"""One file per command: ``add(commands)`` says what it takes, ``run(options)`` gives the answer.

A new command is such a file and a line in `budgetopt._cli.COMMANDS`.
"""
