// Package gossip lets the members of a job find each other without a server: hashicorp/memberlist says who is alive, and
// carries what the machine of package agree decides.
package gossip
