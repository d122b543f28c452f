// Package rpc is the transport that the servers and clients of the lighthouse and the manager share:
// addresses, listening, dialing, TLS handshakes, limits, retries, and the recovery of panics.
//
// It makes no decisions about quorums or commits. All connections go through Network, so that tests run the
// same servers on in-memory connections and a fake clock. Package auth decides which calls are allowed;
// package wire converts messages.
package rpc
