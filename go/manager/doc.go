// Package manager holds the manager server, one per replica group, its client, and the client of the
// lighthouse: the shells around the machine in package round and around package recovery.
//
// RPCs, cancelled calls and broken connections become events; actions answer the calls that wait. The machine
// takes one event at a time, under the server's lock: that lock is the machine's single thread. So a rank in the server's own
// process, such as group rank 0, gets its answer without a switch of threads.
package manager
