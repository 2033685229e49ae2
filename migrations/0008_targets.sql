-- What a model wants to be said before a text that is to be found, such as "passage: " (E5).
--
-- Locks: holdfast.embedding_targets for a moment; it has a row a target. Old code: may go on beside
-- this, but sends texts of a target with a prefix without it: register such a target when all
-- workers are new. Undo: ALTER TABLE holdfast.embedding_targets DROP COLUMN prefix.

ALTER TABLE holdfast.embedding_targets ADD COLUMN prefix text NOT NULL DEFAULT '';
