// Package rpc is the transport that the servers and clients of the lighthouse and the manager share: addresses, listening,
// dialing, TLS handshakes, limits, retries, and the recovery of panics.
//
// It decides nothing about quorums or commits. Everything goes through Network, so that tests run the same servers on
// in-memory connections and a fake clock. Who may call is decided in package auth; what a message says, in package wire.
package rpc
