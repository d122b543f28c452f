// Package sim runs histories of a job: the real lighthouse, manager servers and clients, on connections in
// memory and the clock of testing/synctest, under random faults. Only the training is a model: the ranks with
// their Manager, and their collectives. A judge checks the rules of docs/internals/correctness.md by the
// messages that members and ranks receive. The package contains tests only.
package sim
