// Package gossip connects the members of a job without a server. hashicorp/memberlist detects which members
// are alive, and transports the messages of the machine in package agree.
package gossip
