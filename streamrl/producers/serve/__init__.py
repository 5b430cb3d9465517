"""An engine in this process, served to runs on other hosts: `streamrl engines serve`."""
