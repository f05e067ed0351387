"""``penstock report``: a page of what traces show, in one file.

report_command  the command
findings        all numbers of the page, from merged traces; pure
figures         its pictures
page            its text, by the template page.html
"""
