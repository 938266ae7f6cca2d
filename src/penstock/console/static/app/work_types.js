// Shapes of work as the server tells them (`/api/work`): types alone.

/**
 * @typedef {object} WorkEntry
 * @property {string} id
 * @property {"job" | "batch"} kind
 * @property {string} name
 * @property {string} state
 * @property {string} owner
 * @property {string} createdAt
 * @property {string | null} endedAt
 * @property {number} total
 * @property {import("./parts/progress.js").Counts} counts
 * @property {number | null} ratePerSecond
 * @property {number | null} etaSeconds
 * @property {[number, number] | null} etaRange
 * @property {string | null} jobType
 * @property {string | null} fileName
 * @property {string} changes another text whenever a row has moved
 * @property {number} reruns how often rows were put back to run again
 */

/**
 * @typedef {object} Limit
 * @property {number | null} calls
 * @property {number | null} floor
 * @property {number | null} ceiling
 * @property {number | null} perSecond
 * @property {string | null} why
 * @property {string | null} movedAt
 * @property {"waiting" | "halted" | null} gate
 * @property {string | null} gateUntil
 * @property {string | null} gateCode
 * @property {string | null} gateMessage
 */

/**
 * @typedef {object} WorkMore
 * @property {string | null} provider
 * @property {string | null} model
 * @property {{p50: number | null, p95: number | null, p99: number | null} | null} latency
 * @property {{input: number, output: number}} tokens
 * @property {Limit | null} limit
 * @property {string | null} lastError
 * @property {{done: boolean, rows: number, problem: string | null} | null} ingest
 * @property {{id: string, row: number, requeued: number, createdAt: string} | null} operation the one that is under way
 * @property {string | null} idle who goes on with a run that nothing works off now
 * @property {string[]} inputColumns
 * @property {string[]} columns
 */

/** @typedef {WorkEntry & WorkMore} WorkDetail */

/**
 * @typedef {object} Operation
 * @property {string} id
 * @property {string} kind
 * @property {"RUNNING" | "DONE" | "FAILED" | "CANCELLED"} state
 * @property {number} row
 * @property {number} requeued
 * @property {number} wornOut
 * @property {string | null} error
 * @property {string} createdAt
 * @property {string | null} endedAt
 */

/**
 * @typedef {object} Item
 * @property {string} id
 * @property {number} row
 * @property {string} status
 * @property {string | null} [customId]
 * @property {number} attempts
 * @property {any} input
 * @property {any} result
 * @property {string | null} error
 * @property {string | null} lockedBy
 * @property {string} updatedAt
 */

export {};
