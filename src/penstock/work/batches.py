from penstock.work.create import KnownBatch, create_batch, find_by_key, release_key
from penstock.work.steer import pause, resume, cancel
from penstock.work.finish import finish_batch as finish, finish_batches as finish_all
from penstock.work.upkeep import unfinished, changed, closing, steered, fold, keep_line, hold_strays, take_turn
from penstock.work.read import Batch, Status, Which, batch_of_result, get_batch, list_batches, read_status
from penstock.work.request import Requested, request_batch, unvalidated, validate_batch
from penstock.work.retry import NotFailed, NotRetryable, Retried, give_up_reruns, retry_batch, worn_out_message
