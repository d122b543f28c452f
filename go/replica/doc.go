// Package replica keeps the states of all jobs equal on the lighthouses of a cluster, by Raft
// (github.com/hashicorp/raft).
//
// A state is proposed by the leader and is kept once a majority of the cluster has it on disk. The package
// does not read states: they are bytes, by job. It decides nothing about quorums.
//
// Invariants:
//   - At most one lighthouse leads in a term, and terms grow. Verify and Propose name the term of their
//     caller, and fail in another one.
//   - A leader has all states that were ever kept, before Leadership says that it leads.
//   - A lighthouse whose disk fails, hangs or is damaged sends nothing from then on. The others elect a new
//     leader.
//   - A lighthouse has an instance: a random id in its state directory. Connections are for an instance. So a
//     lighthouse that has lost its directory cannot vote for the one that it was: it has to be removed from
//     the cluster and added again.
package replica
