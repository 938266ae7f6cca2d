-- Apart from the step that adds the constraint: looking at every batch, it lets others write.
ALTER TABLE penstock.batches VALIDATE CONSTRAINT batches_dialect_legal;
