-- Runs of `penstock run` become batches like others: those over tables are jobs, and those over requests have result
-- files, which the API reads. Runs that an older release makes meanwhile work on; they have no result files.
UPDATE penstock.batches b SET dialect = 'job'
 WHERE b.dialect = 'run' AND EXISTS (SELECT FROM penstock.jobs j WHERE j.batch_id = b.id);

UPDATE penstock.batches SET output_file_id = gen_random_uuid(), error_file_id = gen_random_uuid()
 WHERE dialect = 'run' AND pool LIKE 'run:%' AND deleted_at IS NULL AND output_file_id IS NULL;

INSERT INTO penstock.files
  (id, owner, filename, state, kind, purpose, batch_id, lines, bytes, created_at, sealed_at)
SELECT r.id, b.owner, 'batch_' || replace(b.id::text, '-', '') || r.ending, 'ready', r.kind, 'batch_output', b.id, r.lines,
       r.bytes, now(), now()
  FROM penstock.batches b
 CROSS JOIN LATERAL (VALUES
   ('output', b.output_file_id, '_output.jsonl', b.completed, b.output_bytes),
   ('errors', b.error_file_id, '_error.jsonl',
    CASE WHEN b.file_id IS NULL THEN b.failed + b.not_found + b.skipped ELSE b.total - b.completed END, b.error_bytes)
 ) AS r (kind, id, ending, lines, bytes)
 WHERE b.dialect = 'run' AND b.pool LIKE 'run:%' AND b.deleted_at IS NULL AND b.completed IS NOT NULL AND r.lines > 0;

-- When a batch had completed before it was run again: a rerun that is cancelled leaves it as it was.
ALTER TABLE penstock.batches ADD COLUMN completed_before timestamptz;
