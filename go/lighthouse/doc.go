// Package lighthouse serves the quorum of a job: the shell around the machine in package quorum.
//
// RPCs, cancelled calls and the tick become events; actions answer the calls that wait. The machine takes one event at a time,
// under the server's lock: that lock is the machine's single thread. A goroutine with a channel instead would cost two thread
// switches in each call, and have no advantage.
package lighthouse
