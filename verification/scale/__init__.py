"""Count what a rank of a job of thousands of ranks does in a save, a resume and a rotation.

A few ranks run the package's own code in threads. The other ranks exist as their layouts: their messages come from the
package's encoders (:mod:`.ranks`). Files of tensors are holes. The store is Paddle's, with a client per node.
"""
