// Package manager is the manager server, one in each replica group: the shell around the machine in package
// round and around package recovery. It serves ranks (package rankclient is the client), and is a member of
// the job (package membership).
//
// RPCs, cancelled calls and broken connections become events; actions answer the pending calls. The machine
// takes one event at a time, under the server's lock, and has no goroutine of its own. So a rank in the
// server's own process, such as group rank 0, gets its answer without a thread switch.
package manager
