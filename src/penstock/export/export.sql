-- name: list_lanes
-- The lanes of a batch, for merging their outcomes back into input order.
SELECT id, source_id, source_lane, total FROM penstock.lanes WHERE batch_id = %(batch)s ORDER BY id

-- name: read_outcomes
-- One lane's outcomes from an ordinal on: at least one, and no more than a byte budget.
SELECT o.ordinal, o.line, o.state::text, o.custom_id, o.status_code, o.request_id, o.error_code, o.error_message,
       o.response
  FROM (SELECT ordinal, line, state, custom_id, status_code, request_id, error_code, error_message, response,
               sum(coalesce(octet_length(response), 0)) OVER (ORDER BY ordinal)
                 - coalesce(octet_length(response), 0) AS before
          FROM penstock.outcomes
         WHERE lane_id = %(lane)s AND ordinal >= %(from)s
         ORDER BY ordinal
         LIMIT %(rows)s) AS o
 WHERE o.before < %(bytes)s
 ORDER BY o.ordinal

-- name: read_inputs_missing
-- One lane's inputs that have no outcome, from an ordinal on: the lines a cancelled or expired batch never ran.
-- The inner LIMIT keeps this one probe per input: as an anti-join, stale statistics made it read all of the lane's
-- outcomes for each page, or even for each input.
SELECT t.ordinal, t.line, t.custom_id
  FROM penstock.templates t
  LEFT JOIN LATERAL (
    SELECT true AS found FROM penstock.outcomes WHERE lane_id = %(lane)s AND ordinal = t.ordinal LIMIT 1) AS o ON true
 WHERE t.source_id = %(source_id)s AND t.source_lane = %(source_lane)s AND t.ordinal >= %(from)s
   AND o.found IS NULL
 ORDER BY t.ordinal
 LIMIT %(rows)s
