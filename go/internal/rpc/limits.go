package rpc

import (
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/keepalive"
)

const (
	// MaxMessage is the largest answer that a client accepts, in bytes. gRPC's default, 4 MiB, is enough for
	// some 4,000 groups with 8 handles each.
	MaxMessage = 256 << 20
	// MaxRequest is the largest message that a server accepts: the record of one group, which is sent to
	// every other group. Upstream servers have the same limit.
	MaxRequest = 4 << 20
	// maxHeader bounds the headers of a request, in HTTP and gRPC.
	maxHeader = 64 << 10
	// maxStreams bounds the concurrent calls on one connection. A rank has two or three.
	maxStreams = 1000
	// MaxReplicaID is the longest name of a replica group, in bytes.
	MaxReplicaID = 1 << 10
	// MaxWait bounds a call without a deadline, so that no call waits for ever.
	MaxWait = 10 * time.Minute

	// A silent peer is pinged after pingAfter, and its connection is closed pingTimeout later. This
	// detects a host without power, and a killed process whose sockets are still open in a forked child.
	pingAfter   = 5 * time.Second
	pingTimeout = 10 * time.Second
	// A client may ping this often: gRPC's default would end the connections of peers that ping each 10 s.
	pingAllowed = time.Second
	// These pings are those of a manager server to the ranks of its group, which send it no heartbeats.
	// With the 200 ms that a rank has to reconnect they notice its host's failure within 5 s, as the
	// lighthouse does that of the manager server's host with its default heartbeat timeout. One second is
	// gRPC's lower bound.
	rankPingAfter   = time.Second
	rankPingTimeout = 3750 * time.Millisecond
	// clientPingAfter is gRPC's lower bound.
	clientPingAfter = 10 * time.Second

	// sniffTimeout bounds the time until the first bytes of a connection show gRPC or HTTP.
	sniffTimeout = 5 * time.Second
	// window is the flow control window of a stream and a connection. With a fixed window gRPC sends no pings
	// to estimate one, and the quorum of a large job is sent without waiting for acknowledgments.
	window = 4 << 20
	// readBuffer is the size of a server's read buffer for each connection: requests are small. gRPC's
	// default, 32 KiB, takes 320 MB for 10,000 groups.
	readBuffer = 2 << 10
	// writeBuffer is the size of a server's buffers for writing. They come from a pool: a connection has one
	// only while it writes. But gRPC delays the flush of a buffer that holds little, so during a message to
	// all groups each connection has one: at gRPC's default of 32 KiB, 320 MB for 10,000 groups. Below 16
	// KiB, the size of an HTTP/2 frame, the long answers to upstream's managers take more time.
	writeBuffer = 16 << 10
	// stopGrace is how long a stopping server waits for peers to receive the answers that it has sent.
	stopGrace = time.Second
)

func serverLimits() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.MaxRecvMsgSize(MaxRequest),
		grpc.MaxSendMsgSize(MaxMessage),
		grpc.StaticStreamWindowSize(window),
		grpc.StaticConnWindowSize(window),
		grpc.ReadBufferSize(readBuffer),
		grpc.WriteBufferSize(writeBuffer),
		grpc.MaxHeaderListSize(maxHeader),
		grpc.MaxConcurrentStreams(maxStreams),
		grpc.ConnectionTimeout(sniffTimeout),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: pingAfter, Timeout: pingTimeout}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: pingAllowed,
			PermitWithoutStream: true}),
		grpc.WaitForHandlers(true),
	}
}

// RankPings is the option of a server whose clients are the ranks of a group.
func RankPings() grpc.ServerOption {
	return grpc.KeepaliveParams(keepalive.ServerParameters{Time: rankPingAfter, Timeout: rankPingTimeout})
}

func clientLimits() []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessage), grpc.MaxCallSendMsgSize(MaxMessage)),
		grpc.WithStaticStreamWindowSize(window),
		grpc.WithStaticConnWindowSize(window),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: clientPingAfter, Timeout: pingTimeout,
			PermitWithoutStream: true}),
		// A connection stays open between steps, however long these take.
		grpc.WithIdleTimeout(0),
		// gRPC's default backoff grows to two minutes. A client should reconnect to a restarted lighthouse
		// within a second, including RetryBackoff, which is added to this backoff. And after an interruption
		// of 100 ms, groups must reconnect before they count as failed, which is 200 ms after the
		// interruption began: until then, attempts are at most 50 ms apart.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1.2, Jitter: 0.2,
				MaxDelay: 400 * time.Millisecond},
			MinConnectTimeout: 5 * time.Second,
		}),
	}
}
