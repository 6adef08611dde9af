"""The subcommands of `adaflash`, one file each. Heavy imports happen inside the commands, so `--help` is quick."""
