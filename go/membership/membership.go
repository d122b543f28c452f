// Package membership defines the interface through which a manager server takes part in a job: it requests
// quorums, sends reports, and receives notices about other members. Package lighthouses implements it with
// the job's lighthouses.
package membership

import (
	"context"
	"time"

	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// Doing returns what a heartbeat says of a group.
type Doing func() quorum.Doing

// Membership forms the quorums of a replica group.
type Membership interface {
	// Quorum waits for a quorum with m in it. knownQuorumID is the last quorum of the member, 0 if none.
	Quorum(ctx context.Context, m quorum.Member, knownQuorumID int64) (*quorum.Quorum, error)
	// Attend sends heartbeats until one fails or ctx ends. It calls reached after each successful one.
	// interval is the time between two heartbeats, unless the other side asks for another interval. doing
	// returns what a heartbeat says of the group.
	Attend(ctx context.Context, interval time.Duration, reached func(), doing Doing) error
	// Notices returns the channel of the lighthouse's notices, which save members from waiting for timeouts.
	Notices() <-chan *torchftpb.Notice
	// Report sends a message that is not answered. It does not block.
	Report(message *torchftpb.MemberMessage)
	// Trains records the quorum that stands for the group, and the step that it is in; 0: none stands. It
	// does not block.
	Trains(quorumID, step int64)
	// Leave announces that the group has completed its last step, so that its end is no failure. It returns
	// when the group's peers have completed that step too, and no longer need its data. It may be called
	// several times, also concurrently.
	Leave(ctx context.Context) error
	// Finish makes Close announce that the training is complete, after a number of committed steps; 0: the
	// number is not known. A lighthouse that has received this announcement from all groups of a job forgets
	// the job's past. Groups of the same run that come back are told of the end, if its step is known.
	Finish(step int64)
	// Close ends the connection, and every call with it.
	Close() error
}
