// Package lighthouse serves the quorum of a job: the shell around the machine in package quorum.
//
// RPCs, cancelled calls and the tick become events; actions answer the pending calls. Each job has a machine,
// which takes one event at a time, under the job's lock. A goroutine of the machine, with a channel for the
// events, would cost two thread switches in each call, and have no advantage.
package lighthouse
