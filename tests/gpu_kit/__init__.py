"""The check on a GPU: parts that compare what probingd says with a truth that is not ours, and their report.

``make gpu-kit`` puts this package, our wheel and what it needs into ``.build/gpu-kit``; ``run`` there starts
``gpu_kit.__main__``. ``runner`` gives each part a process and a deadline; ``parts`` has what is checked, ``jobs`` the
programs that are watched.
"""
