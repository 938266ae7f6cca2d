from penstock.work.finish import end_if_over as finish, fail_batch as fail
